"""How long a pipeline takes on so many workers: measured stage costs and a discrete model."""
