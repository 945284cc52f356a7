"""How things are shown: tables, screens, bars, curves and metrics. It decides nothing."""
