"""CUDA C++ for the driver of a GPU, compiled as it is loaded: by NVRTC, which torch's builds for CUDA bring along."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_OPTIONS = ("--std=c++17",)


class Kernel:
    """One kernel of a `CudaCode`."""

    def __init__(self, driver: ctypes.CDLL, function: ctypes.c_void_p) -> None:
        self._driver, self._function = driver, function

    def launch(self, grid: tuple[int, int], threads: int, *arguments: Tensor | int) -> None:
        """Launch it on the current stream of the current device; integers are passed as `int`.

        Raises:
            RuntimeError: the driver refuses it.
        """
        values: list[Any] = [
            ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else ctypes.c_int(each) for each in arguments
        ]
        addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = self._driver.cuLaunchKernel(
            self._function, grid[0], grid[1], 1, threads, 1, 1, 0, stream, addresses, None
        )
        _require(error == 0, f"the launch of a kernel failed with error {error}")


class CudaCode:
    """The kernels of a source, on the current device, whose context torch has made.

    Raises:
        RuntimeError, OSError: it cannot be compiled or loaded here.
    """

    def __init__(self, source: str) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        module = ctypes.c_void_p()
        error = self._driver.cuModuleLoadData(ctypes.byref(module), _compiled(source))
        _require(error == 0, f"the driver loads no kernels (error {error})")
        self._module = module

    def kernel(self, name: str) -> Kernel:
        """Return the kernel of a name, which is `extern "C"`."""
        function = ctypes.c_void_p()
        error = self._driver.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode())
        _require(error == 0, f"there is no kernel {name}")
        return Kernel(self._driver, function)


def _compiled(source: str) -> bytes:
    """Return the code of a source for the current device."""
    # The library depends on NVRTC and finds it where its wheel put it; its symbols are found through it.
    nvrtc = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
    program = ctypes.c_void_p()
    error = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None)
    _require(error == 0, f"NVRTC fails with error {error}")
    try:
        major, minor = torch.cuda.get_device_capability()
        options = [option.encode() for option in (*_OPTIONS, f"--gpu-architecture=sm_{major}{minor}")]
        error = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        _require(error == 0, f"NVRTC cannot compile the kernels: {_text(nvrtc, program)}")
        size = ctypes.c_size_t()
        _require(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0, "NVRTC made no code")
        code = ctypes.create_string_buffer(size.value)
        _require(nvrtc.nvrtcGetCUBIN(program, code) == 0, "NVRTC gives no code")
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")


def _require(is_right: bool, reason: str) -> None:
    if not is_right:
        raise RuntimeError(reason)
