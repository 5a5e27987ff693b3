"""Tests EGL and Vulkan in a container: lists their devices, draws a pixel with EGL, prints JSON.

It needs only ctypes. The loaders libEGL.so.1 and libvulkan.so.1 come from the image; the libraries
that they load for this GPU come from the mirror.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_uint32, c_void_p, cast
from pathlib import Path
from typing import Any

EGL_PLATFORM_DEVICE_EXT = 0x313F
EGL_HEIGHT, EGL_WIDTH, EGL_NONE = 0x3056, 0x3057, 0x3038
EGL_SURFACE_TYPE, EGL_PBUFFER_BIT = 0x3033, 1
EGL_RENDERABLE_TYPE, EGL_OPENGL_ES2_BIT = 0x3040, 4
EGL_CONTEXT_CLIENT_VERSION = 0x3098
EGL_OPENGL_ES_API = 0x30A0
EGL_VENDOR, EGL_VERSION = 0x3053, 0x3054
GL_RENDERER, GL_VERSION = 0x1F01, 0x1F02
GL_COLOR_BUFFER_BIT, GL_RGBA, GL_UNSIGNED_BYTE = 0x4000, 0x1908, 0x1401
VK_API_VERSION_1_1 = 1 << 22 | 1 << 12


def egl() -> dict[str, Any]:
    """Return vendor, version, renderer and the colour of a pixel after the surface was cleared."""
    library = ctypes.CDLL("libEGL.so.1")
    library.eglGetProcAddress.restype = c_void_p
    library.eglQueryString.restype = c_char_p
    library.eglQueryString.argtypes = (c_void_p, c_int)

    def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        address = library.eglGetProcAddress(name.encode())
        if not address:
            raise RuntimeError(f"eglGetProcAddress does not know {name}")
        return ctypes.CFUNCTYPE(result, *arguments)(address)

    count = c_int()
    devices = (c_void_p * 16)()
    query = function("eglQueryDevicesEXT", c_uint32, c_int, c_void_p, c_void_p)
    require(query(16, devices, byref(count)) and count.value, "eglQueryDevicesEXT finds a device")
    get = function("eglGetPlatformDisplayEXT", c_void_p, c_uint32, c_void_p, c_void_p)
    display = c_void_p(get(EGL_PLATFORM_DEVICE_EXT, devices[0], None))
    major, minor = c_int(), c_int()
    require(library.eglInitialize(display, byref(major), byref(minor)), "eglInitialize")
    answer = {
        "devices": count.value,
        "vendor": library.eglQueryString(display, EGL_VENDOR).decode(),
        "version": library.eglQueryString(display, EGL_VERSION).decode(),
    }
    require(library.eglBindAPI(EGL_OPENGL_ES_API), "eglBindAPI")
    wanted = (c_int * 5)(
        EGL_SURFACE_TYPE, EGL_PBUFFER_BIT, EGL_RENDERABLE_TYPE, EGL_OPENGL_ES2_BIT, EGL_NONE
    )
    config = c_void_p()
    chosen = library.eglChooseConfig(display, wanted, byref(config), 1, byref(count))
    require(chosen and count.value, "eglChooseConfig")
    for name in ("eglCreatePbufferSurface", "eglCreateContext"):
        getattr(library, name).restype = c_void_p
    size = (c_int * 5)(EGL_WIDTH, 4, EGL_HEIGHT, 4, EGL_NONE)
    surface = c_void_p(library.eglCreatePbufferSurface(display, config, size))
    version = (c_int * 3)(EGL_CONTEXT_CLIENT_VERSION, 2, EGL_NONE)
    context = c_void_p(library.eglCreateContext(display, config, None, version))
    current = library.eglMakeCurrent(display, surface, surface, context)
    require(current, "eglMakeCurrent")
    text = function("glGetString", c_char_p, c_uint32)
    answer["renderer"], answer["gl"] = text(GL_RENDERER).decode(), text(GL_VERSION).decode()
    colour = ctypes.c_float
    function("glClearColor", None, colour, colour, colour, colour)(1.0, 0.0, 1.0, 1.0)
    function("glClear", None, c_uint32)(GL_COLOR_BUFFER_BIT)
    pixel = (ctypes.c_ubyte * 4)()
    read = function("glReadPixels", None, c_int, c_int, c_int, c_int, c_uint32, c_uint32, c_void_p)
    read(0, 0, 1, 1, GL_RGBA, GL_UNSIGNED_BYTE, pixel)
    answer["pixel"] = list(pixel)
    return answer


class ApplicationInfo(ctypes.Structure):
    """VkApplicationInfo."""

    _fields_ = (
        ("sType", c_int),
        ("pNext", c_void_p),
        ("pApplicationName", c_char_p),
        ("applicationVersion", c_uint32),
        ("pEngineName", c_char_p),
        ("engineVersion", c_uint32),
        ("apiVersion", c_uint32),
    )


class InstanceCreateInfo(ctypes.Structure):
    """VkInstanceCreateInfo."""

    _fields_ = (
        ("sType", c_int),
        ("pNext", c_void_p),
        ("flags", c_uint32),
        ("pApplicationInfo", POINTER(ApplicationInfo)),
        ("enabledLayerCount", c_uint32),
        ("ppEnabledLayerNames", c_void_p),
        ("enabledExtensionCount", c_uint32),
        ("ppEnabledExtensionNames", c_void_p),
    )


def vulkan() -> dict[str, Any]:
    """Return the names of the physical devices."""
    library = ctypes.CDLL("libvulkan.so.1")
    application = ApplicationInfo(sType=0, apiVersion=VK_API_VERSION_1_1)
    create = InstanceCreateInfo(sType=1, pApplicationInfo=ctypes.pointer(application))
    instance = c_void_p()
    status = library.vkCreateInstance(byref(create), None, byref(instance))
    require(status == 0, f"vkCreateInstance (VkResult {status})")
    count = c_uint32(16)
    devices = (c_void_p * 16)()
    status = library.vkEnumeratePhysicalDevices(instance, byref(count), devices)
    require(status == 0, f"vkEnumeratePhysicalDevices (VkResult {status})")
    names = []
    for device in devices[: count.value]:
        properties = ctypes.create_string_buffer(2048)
        library.vkGetPhysicalDeviceProperties(c_void_p(device), properties)
        # The name follows four 32-bit numbers and the type.
        names.append(cast(byref(properties, 20), c_char_p).value.decode())
    return {"devices": names}


def mapped() -> list[str]:
    """Return the paths of the driver's libraries that this process has loaded."""
    with Path("/proc/self/maps").open(encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if "/" in line}
    return sorted(p for p in paths if "nvidia" in p.lower() or "libcuda" in p)


def require(condition: Any, step: str) -> None:
    """Raise RuntimeError with the name of the step if `condition` is false."""
    if not condition:
        raise RuntimeError(f"failed: {step}")


def main() -> int:
    """Test both interfaces; return the number of those that failed, as the exit status."""
    answer: dict[str, Any] = {}
    failed = 0
    for ask in (egl, vulkan):
        try:
            answer[ask.__name__] = ask()
        except (OSError, RuntimeError) as e:
            answer[ask.__name__] = {"error": str(e)}
            failed += 1
    answer["mapped"] = mapped()
    print(json.dumps(answer))
    return failed


if __name__ == "__main__":
    sys.exit(main())
