"""Where a store lies: a directory, or a URL of an object store."""

import os
import urllib.parse

from jaxrag.base.errors import StoreError

_S3_OPTIONS = ("endpoint", "aws_region")


def kvstore_spec(location: str) -> str | dict[str, str]:
    """What TensorStore opens for a location: a file store for a path, a URL as it is.

    A server that speaks S3 is named behind the bucket, which no URL of TensorStore can:
    ``s3://BUCKET/PATH?endpoint=URL&aws_region=REGION``.

    Raises:
        StoreError: the location is empty, or an s3 URL with other options.
    """
    if not location:
        raise StoreError("the location is empty: expected a directory or a URL")
    if location.startswith("s3://") and "?" in location:
        return _s3_spec(location)
    if "://" in location:
        return location
    return {"driver": "file", "path": f"{os.path.abspath(location)}/"}


def _s3_spec(location: str) -> dict[str, str]:
    url = urllib.parse.urlsplit(location)
    options = dict(urllib.parse.parse_qsl(url.query))
    if options.keys() - _S3_OPTIONS or not options or not url.netloc:
        raise StoreError(
            f"{location}: expected s3://BUCKET/PATH with {' and '.join(_S3_OPTIONS)} as the only "
            "options behind '?'"
        )
    return {"driver": "s3", "bucket": url.netloc, "path": url.path.lstrip("/"), **options}
