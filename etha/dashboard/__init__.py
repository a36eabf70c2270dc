"""The page of ``etha dashboard``: what it shows (``model``), where that comes from (``collector``), the server."""
