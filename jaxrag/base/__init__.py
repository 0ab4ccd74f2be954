"""What everything stands on: errors, types, shapes, tables, configuration."""
