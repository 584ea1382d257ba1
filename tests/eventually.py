"""How long a test waits for what must happen: so long that only a hang runs into it, on any machine."""

EVENTUALLY_S = 300
