"""What a profile knows, in the formats that engines read: one file a format."""
