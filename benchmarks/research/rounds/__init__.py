"""Shows where the time of a round goes: profiles, and the spans of a generation as intervals."""
