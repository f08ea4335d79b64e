"""The steps, numbered from 0001 in the order in which they are taken."""
