// Everything: include this one.
#pragma once

#include "logitless/compiler.h"
#include "logitless/context.h"
#include "logitless/cross_entropy.h"
#include "logitless/dtype.h"
#include "logitless/error.h"
#include "logitless/far_field.h"
#include "logitless/graph.h"
#include "logitless/head.h"
#include "logitless/memory.h"
#include "logitless/parallel.h"
#include "logitless/plan.h"
#include "logitless/tensor_file.h"
#include "logitless/tensor_view.h"
#include "logitless/version.h"
#include "logitless/vocab_order.h"
