"""What strategies take on real clusters: candidates, what runs tell, and what runs next; docs/finetune.md."""
