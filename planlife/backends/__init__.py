"""Who plans and decodes: one protocol (`base.Backend`), one file per library."""
