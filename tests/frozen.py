"""The last module that the server of ``processes.py`` loads: collections in the processes of tests leave it alone.

It would write to every object that it looks at, so the process would get a copy of all of that memory.
"""

import gc

gc.collect()
gc.freeze()
