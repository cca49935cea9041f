"""A certificate's rotation: files that cannot be used yet, and files that change while they are in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from specsplit.core.errors import InvalidSettings
from specsplit.rpc import credentials
from specsplit.rpc.certificate import CertificateFiles, read_certificate
from specsplit.rpc.credentials import Certificates
from tests.support.certificates import Authority


def test_files_that_fail_once_are_tried_again_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    paths, new = (Authority(tmp_path / name).role("target") for name in ("old", "new"))
    certificates = Certificates(CertificateFiles(paths.cert, paths.key, paths.ca), "target")
    paths.replace_with(new)
    refusal = "not yet valid"

    def read(files: CertificateFiles) -> Any:
        if refusal:
            raise InvalidSettings(refusal)
        return read_certificate(files)

    monkeypatch.setattr(credentials, "read_certificate", read)
    for _ in range(3):
        certificates.look()
    assert caplog.text.count("not yet valid") == 1
    refusal = "cannot be read"
    certificates.look()
    assert "cannot be read" in caplog.text
    refusal = ""  # time went by, or permissions changed: the files have the same stamp
    certificates.look()
    assert certificates.version == 2
    assert certificates.current.cert == paths.cert.read_bytes()


def test_a_key_goes_with_its_own_certificate_whenever_files_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths, new = (Authority(tmp_path / name).role("target") for name in ("old", "new"))
    old = paths.bytes()

    class Rotating:
        """A certificate that is replaced while its CA is read."""

        identity = read_certificate(CertificateFiles(new.cert, new.key, new.ca)).identity
        _, key, cert = old

        def proves(self, role: str) -> bool:
            return True

        @property
        def ca(self) -> bytes:
            paths.replace_with(new)
            certificates.look()
            return old[0]

    def read(files: CertificateFiles) -> Any:
        return Rotating() if paths.bytes() == old else read_certificate(files)

    used: list[tuple[bytes, ...]] = []

    def make(*files: bytes) -> None:
        used.append(files)

    monkeypatch.setattr(credentials, "read_certificate", read)
    monkeypatch.setattr(grpc, "ssl_channel_credentials", make)
    certificates = Certificates(CertificateFiles(paths.cert, paths.key, paths.ca), "target")
    certificates.channel_credentials()
    assert certificates.version == 2
    assert used == [old]
