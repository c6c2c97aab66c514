// each_real - includes BODY once for f32 and once for f64. In BODY, R(name) is name_f32 or
// name_f64, Real the element, V the vector and L its lanes. Not guarded: that is its purpose.
#define R(name) PASTE(name, REAL)
#define RK(name) KERNEL(R(name)) // an exported kernel: name_f32_avx2
#define V R(vec)
#define L R(LANES)

#define REAL f32
#define Real float
#define REAL_IS_F32 1
#include BODY
#undef REAL
#undef Real
#undef REAL_IS_F32

#define REAL f64
#define Real double
#define REAL_IS_F32 0
#include BODY
#undef REAL
#undef Real
#undef REAL_IS_F32

#undef R
#undef RK
#undef V
#undef L
#undef BODY
