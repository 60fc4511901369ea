"""Late-interaction models of ``transformers``."""
