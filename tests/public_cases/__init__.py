"""Tables that others published: fitted on a third of their rows, held against the rest."""
