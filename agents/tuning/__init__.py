"""Fine-tuning on measured timings; docs/finetune.md."""
