"""The app and its process: routes, the page, logs, metrics and health."""
