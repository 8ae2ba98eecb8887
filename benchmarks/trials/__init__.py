"""Does every model train as planned like the model itself? A collection of unlike models, tried as a new user would."""
