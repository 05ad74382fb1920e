"""An image rule of native sizes, with videos."""

from eyeline.core.image_rule import Area, ImageRule, VideoLimits

HALF = (0.5, 0.5, 0.5)
NATIVE = ImageRule(4, 2, HALF, HALF, "bicubic", Area(64, 8 * 8 * 30), frames=2, positions="grid", video=VideoLimits(64, 8 * 8 * 60))
