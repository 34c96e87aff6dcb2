# SPDX-License-Identifier: Apache-2.0
"""Secrets and signatures, as services of launchers use them."""
import hashlib
import hmac
import secrets

SECRET_LENGTH = 32
DIGEST_LENGTH = 32
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"  # of the environment


def make_secret_key():
    return secrets.token_bytes(SECRET_LENGTH)


def compute_digest(key, message):
    return hmac.new(key, message, hashlib.sha256).digest()


def check_digest(key, message, digest):
    """Was the message signed with this key?"""
    return hmac.compare_digest(compute_digest(key, message), digest)
