"""What a test needs to know of a running S3 server: where it is, who we are there, and how to make a bucket."""

from dataclasses import dataclass
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session


@dataclass(frozen=True)
class S3Server:
    """A running S3 server on this machine."""

    name: str
    endpoint: str
    access_key: str
    secret_key: str
    pid: int = 0

    def environment(self) -> dict[str, str]:
        """The variables that send every AWS client (ours among them) to this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, bucket: str) -> None:
        """Make `bucket`; nothing happens when it is there."""
        client = self.client()
        try:
            client.create_bucket(Bucket=bucket)
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise
        finally:
            client.close()

    def drop_bucket(self, bucket: str) -> None:
        """Remove `bucket`, which is empty."""
        client = self.client()
        try:
            client.delete_bucket(Bucket=bucket)
        finally:
            client.close()

    def takes_objects(self, bucket: str) -> bool:
        """True once the server makes the bucket and keeps an object in it: ready for tests."""
        try:
            self.make_bucket(bucket)
            client = self.client()
            try:
                client.put_object(Bucket=bucket, Key="ready", Body=b"yes")
                client.delete_object(Bucket=bucket, Key="ready")
            finally:
                client.close()
        except (BotoCoreError, ClientError):
            return False
        return True

    def client(self) -> Any:
        """A plain client of botocore's with this server's keys."""
        return Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(connect_timeout=1, read_timeout=5, retries={"total_max_attempts": 1}),
        )
