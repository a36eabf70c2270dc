"""Publications: one publisher, subscribers that come and go."""
