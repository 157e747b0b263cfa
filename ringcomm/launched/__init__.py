"""How this process was started. Only config.py and this folder read or change the environment."""
