"""Process groups whose members come and go."""
