"""Volunteers, who just join: the owner's invitation, the machine's check, a site that comes and goes as it likes."""
