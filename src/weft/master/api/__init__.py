"""netmaster's REST API: objects, Contiv's plugin calls, policy queries, backup, OpenAPI, leader proxy."""
