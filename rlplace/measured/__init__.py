"""What plans took on real clusters: trials, their store, and what is learned from them; docs/finetune.md."""
