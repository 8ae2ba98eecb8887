"""The whole strategy: replicas, devices a replica, micro-batches and schedule, with a plan for each."""
