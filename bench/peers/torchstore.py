NAME = "torchstore"
PROBE = "raise ImportError('later')"
INSTALL = ""
