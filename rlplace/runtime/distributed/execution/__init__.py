"""What runs a step: the engines, their order of passes, what travels between processes, and gradients of replicas."""
