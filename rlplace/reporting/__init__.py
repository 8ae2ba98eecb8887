"""Pictures of a plan: the HTML report, pictures for papers, and what the environments render."""
