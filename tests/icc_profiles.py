"""Colours by hand: spaces of red, green and blue, and their ICC profiles, from primaries and curves."""
import struct

import numpy as np

D65, D50 = np.array([0.3127 / 0.3290, 1, 0.3583 / 0.3290]), np.array([0.9642, 1, 0.8249]) # XYZ of white
CONES = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]) # Bradford's
TO_D50 = np.linalg.inv(CONES) @ np.diag(CONES @ D50 / (CONES @ D65)) @ CONES
PRIMARIES = { # xy of red, green and blue; white is D65
    "sRGB": ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06)), "P3": ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060)),
    "Adobe": ((0.64, 0.33), (0.21, 0.71), (0.15, 0.06)), "linear": ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))}
PRIMARIES["ProPhoto"] = PRIMARIES["linear ProPhoto"] = ((0.7347, 0.2653), (0.1596, 0.8404), (0.0366, 0.0001))

def to_xyz(name):
    """The matrix from linear RGB of these primaries to XYZ under D65."""
    columns = np.array([(x / y, 1, (1 - x - y) / y) for x, y in PRIMARIES[name]]).T
    return columns * np.linalg.solve(columns, D65)

def srgb_curve(x):
    return np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)

def srgb_level(x):
    """Linear light -> levels of sRGB; what it cannot show is clipped."""
    x = x.clip(0, 1)
    return 255 * np.where(x <= 0.0031308, 12.92 * x, 1.055 * x ** (1 / 2.4) - 0.055)

CURVES = {"sRGB": srgb_curve, "P3": srgb_curve, "Adobe": lambda x: x ** (563 / 256), "linear": lambda x: x,
          "linear ProPhoto": lambda x: x, "ProPhoto": lambda x: x ** 1.8}

def in_srgb(pixels, name):
    """Levels (..., 3) of this colour space -> levels of sRGB."""
    linear = CURVES[name](np.asarray(pixels) / 255)
    return srgb_level(linear @ (np.linalg.inv(to_xyz("sRGB")) @ to_xyz(name)).T)

def lab_in_srgb(lab):
    """(..., 3), relative to D50 -> levels of sRGB."""
    y = (lab[..., 0] + 16) / 116
    f = np.stack([y + lab[..., 1] / 500, y, y - lab[..., 2] / 200], -1)
    xyz = D50 * np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29))
    return srgb_level(xyz @ (np.linalg.inv(to_xyz("sRGB")) @ np.linalg.inv(TO_D50)).T)

def fixed(*numbers):
    return struct.pack(f">{len(numbers)}i", *[round(n * 65536) for n in numbers])

def profile_of(space, tags, kind=b"mntr", pcs=b"XYZ "):
    """An ICC profile of version 2: its header, the table of tags, and the tags."""
    tags = {b"wtpt": b"XYZ \0\0\0\0" + fixed(*D50)} | tags
    table, data, start = b"", b"", 128 + 4 + 12 * len(tags)
    for name, content in tags.items():
        table += name + struct.pack(">2I", start + len(data), len(content))
        data += content + bytes(-len(content) % 4)
    header = struct.pack(">I4sI4s4s4s12s4s28s", start + len(data), b"", 0x02400000, kind, space, pcs,
                         struct.pack(">6H", 2020, 1, 1, 0, 0, 0), b"acsp", b"") + fixed(*D50)
    return header.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + data

def curve(function):
    levels = (function(np.linspace(0, 1, 1024)) * 65535).round().astype(">u2")
    return b"curv\0\0\0\0" + struct.pack(">I", len(levels)) + levels.tobytes()

def rgb_profile(name, trc=None):
    """trc: the bytes of its curves, in place of the space's own."""
    tags = {}
    for letter, column in zip("rgb", (TO_D50 @ to_xyz(name)).T):
        tags[f"{letter}XYZ".encode()] = b"XYZ \0\0\0\0" + fixed(*column)
        tags[f"{letter}TRC".encode()] = curve(CURVES[name]) if trc is None else trc
    return profile_of(b"RGB ", tags)
