"""What everything uses: errors, types, shapes, tables, configuration."""
