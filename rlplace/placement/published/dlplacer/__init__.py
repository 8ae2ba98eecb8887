"""DLPlacer: the exact placement program, and hybrid data and model parallelism around it."""
