"""Files by name, wherever they are: on local disk or on object storage."""
