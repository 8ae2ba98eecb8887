"""DLPlacer: the paper's algebra of replicas and their width."""
