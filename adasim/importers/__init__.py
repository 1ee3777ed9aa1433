"""Files that other tools write, read into one set of tables. ``registry.import_files`` is the way in."""
