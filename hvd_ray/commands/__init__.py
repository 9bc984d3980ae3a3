"""The commands of `hvd`: each module has `register(app)` and imports nothing heavy at its top."""
