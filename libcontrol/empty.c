/* An empty library. The libraries that are interposed in front of the driver's libcuda and
 * libnvidia-ml are linked against it in place of the driver's; see meson.build. */
typedef int empty_translation_unit;
