"""This process and its machine: child processes, folders, libraries, torch devices."""
