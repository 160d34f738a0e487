"""Everything that can go wrong with a store: a class for each thing a caller may tell apart."""


class StorageError(ValueError):
    """A store could not do what was asked; the message says what was expected, came, and to do."""


class StoreNotFoundError(StorageError):
    """There is no store at the path."""


class RowError(StorageError):
    """A row does not fit its table: unknown column, wrong type, forbidden NULL, NaN or infinity."""


class ConflictError(StorageError):
    """A derived row has the place of a committed one and another content."""


class SupersededError(StorageError):
    """Another writer opened the stream after this one; nothing was appended."""


class ClosedIterationError(StorageError):
    """A new row belongs to an iteration that is closed."""


class NewerSchemaError(StorageError):
    """The store was written by a newer version."""


class DamagedError(StorageError):
    """A file of the store is missing, cut or altered."""


class DiskFullError(StorageError):
    """The disk is full; nothing of the write became visible."""


class QueryError(StorageError):
    """A query is refused, fails or takes too long."""
