/* An empty library that stands in for one of the driver's while the library that replaces it is
 * linked; see meson.build. */
typedef int empty_translation_unit;
