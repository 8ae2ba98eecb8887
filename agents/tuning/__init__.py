"""Fine-tuning on measured timings; docs/finetune.md."""

METHODS = ("corrected", "direct", "both")
"""What an agent learns from measurements by; see `rlplace.agents.tuning.offline`."""
