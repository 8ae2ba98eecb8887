"""Pictures of a plan: the HTML report, and what the environments render."""
