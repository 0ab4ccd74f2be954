"""Who may read what a chunk was encoded behind, in SQL; ``base.groups.all_read`` says the same."""

_IN_ALL = (
    "(json_type(reader.metadata, '$.groups') != 'null' AND NOT EXISTS "
    "(SELECT 1 FROM json_each(reader.metadata, '$.groups') AS own WHERE own.value NOT IN "
    "(SELECT value FROM json_each(theirs.metadata, '$.groups'))))"
)
# Holds where a chunk of the content ``value`` is in a document that everybody may read who may read
# the document ``reader``.
MAY_PRECEDE = (
    "EXISTS (SELECT 1 FROM chunks AS other JOIN documents AS theirs "
    "ON theirs.id = other.document_id WHERE other.content_id = value AND "
    "(COALESCE(json_type(theirs.metadata, '$.groups'), 'null') = 'null' "
    f"OR COALESCE({_IN_ALL}, 0)))"
)
