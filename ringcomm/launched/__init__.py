"""Finds how this process was started. Only config.py and this folder use the environment."""
