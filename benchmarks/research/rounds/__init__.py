"""Shows where the time of a round goes: spans of a generation as a timeline, profiles, bars of a network."""
