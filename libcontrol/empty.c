/* An empty library that stands for the original while the control library is linked; see
 * meson.build. */
typedef int empty_translation_unit;
