"""How the members of a group on one host meet, what memory they share, and who carries out their calls."""
