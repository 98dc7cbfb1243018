"""The queue behind HTTP: uploads, keys, the video API and the worker processes."""
