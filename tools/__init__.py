"""Tools for those who work on the repository; nothing that runs imports them."""
