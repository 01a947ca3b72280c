//! What calls can cost.

use super::{Entries, Estimation, Origin};
use crate::ast::{Id, Kind, Literal};
use crate::decl::Decl;
use crate::estimate::range::Range;
use crate::eval::cost::{AUTHORIZATION, FORMAT_REGEX, LIST, REGEX, STRUCT, TEXT};
use crate::types::Type;

/// A cost, and the size of the result where it is known.
struct Call {
    cost: Range,
    size: Option<Range>,
}

impl Call {
    fn new(cost: Range) -> Call {
        Call { cost, size: None }
    }

    fn sized(cost: Range, size: Range) -> Call {
        Call { cost, size: Some(size) }
    }
}

const ONE: Range = Range::fixed(1);
/// Of the bytes of an address.
const ADDRESS: Range = Range { min: 4, max: 16 };
const LONGEST_FORMAT_NAME: u64 = 64;

impl<'a> Estimation<'a> {
    pub(super) fn call(&mut self, id: Id, function: &str, target: Option<Id>, args: &'a [Id]) -> Range {
        if let ("dyn", [arg]) = (function, args) {
            let cost = ONE.add(self.cost(*arg));
            self.copy_sizes(id, *arg);
            return cost;
        }
        let costs: Vec<Range> = args.iter().map(|arg| self.cost(*arg)).collect();
        if function == "_?._" {
            // Selection by another name.
            return ONE.add(costs[0]);
        }
        let overloads = self.checked.overloads(id);
        if overloads.is_empty() {
            return Range::ZERO;
        }
        let before = target.map_or(Range::ZERO, |target| self.cost(target));
        let mut cost = Range { min: u64::MAX, max: 0 };
        let mut size: Option<Range> = None;
        for overload in overloads {
            let one = self.overload(id, function, overload.id, target, args, &costs);
            cost = cost.union(one.cost);
            if let Some(one) = one.size {
                size = Some(size.map_or(one, |size| size.union(one)));
            }
            if matches!(overload.id, "index_list" | "index_map") {
                size = self.entries_of(args[0]).map(|entries: Entries| entries.value);
                let origin = self.inside(args[0], |decl| decl.items.as_deref());
                self.origins.insert(id, origin);
            }
            size = size.or_else(|| self.size(id));
        }
        if let Some(size) = size {
            self.sizes.insert(id, size);
        }
        before.add(cost)
    }

    fn overload(
        &mut self,
        id: Id,
        function: &str,
        overload: &str,
        target: Option<Id>,
        args: &[Id],
        costs: &[Range],
    ) -> Call {
        let arguments = costs.iter().fold(Range::ZERO, |sum, cost| sum.add(*cost));
        let known = self
            .list_call(function, overload, target, args)
            .or_else(|| self.kubernetes_call(function, overload, target, args));
        if let Some(known) = known {
            return Call { cost: known.cost.add(arguments), ..known };
        }
        if overload == "logical_and" || overload == "logical_or" {
            return Call::new(Range { min: costs[0].min, max: costs[0].add(costs[1]).max });
        }
        if overload == "conditional" {
            let size = self.size_or_unknown(args[1]).union(self.size_or_unknown(args[2]));
            if let Some(entries) = Entries::union(self.entries_of(args[1]), self.entries_of(args[2])) {
                self.entries.insert(id, entries);
            }
            return Call::sized(costs[0].add(costs[1].union(costs[2])), size);
        }
        let call = self.standard_call(id, overload, target, args);
        Call { cost: call.cost.add(arguments), ..call }
    }

    fn standard_call(&mut self, id: Id, overload: &str, target: Option<Id>, args: &[Id]) -> Call {
        let first = args.first().map_or(Range::UNKNOWN, |arg| self.size_or_unknown(*arg));
        match (overload, target) {
            ("string_format", Some(target)) => Call::new(self.size_or_unknown(target).scaled(TEXT)),
            ("string_to_bytes", _) => {
                Call::sized(first.scaled(TEXT), Range { min: first.min, max: first.max.saturating_mul(4) })
            }
            ("bytes_to_string", _) => {
                Call::sized(first.scaled(TEXT), Range { min: first.min / 4, max: first.max })
            }
            ("strings_quote", _) => {
                let most = first.max.saturating_mul(2).saturating_add(2);
                Call::sized(first.scaled(TEXT), Range { min: first.min.saturating_add(2), max: most })
            }
            ("affix", _) => Call::new(first.scaled(TEXT)),
            ("in_list", _) => Call::new(self.size_or_unknown(args[1])),
            ("matches_string", Some(target)) => {
                let text = self.size_or_unknown(target).add(ONE).scaled(TEXT);
                Call::new(text.multiply(first.scaled(REGEX)))
            }
            ("contains_string", Some(target)) => {
                Call::new(self.size_or_unknown(target).scaled(TEXT).multiply(first.scaled(TEXT)))
            }
            ("add_string" | "add_bytes" | "add_list", _) => {
                let size = first.add(self.size_or_unknown(args[1]));
                if let Some(entries) = Entries::union(self.entries_of(args[0]), self.entries_of(args[1])) {
                    self.entries.insert(id, entries);
                }
                Call::sized(if overload == "add_list" { ONE } else { size.scaled(TEXT) }, size)
            }
            ("compare_text" | "equals" | "not_equals", _) => {
                let most = first.max.min(self.size_or_unknown(args[1]).max);
                Call::new(Range { min: u64::from(most > 0), max: most }.scaled(TEXT))
            }
            _ => Call::new(ONE),
        }
    }

    /// The functions of the lists and sets libraries.
    fn list_call(&mut self, function: &str, overload: &str, target: Option<Id>, args: &[Id]) -> Option<Call> {
        let allocating =
            |factor: f64, size: Range| Call::sized(size.scaled(factor).add(Range::fixed(1 + LIST)), size);
        Some(match (function, target, args) {
            ("sets.contains" | "sets.intersects" | "sets.equivalent", None, [a, b]) => {
                let factor = if function == "sets.equivalent" { 2.0 } else { 1.0 };
                let pairs = self.size_or_unknown(*a).multiply(self.size_or_unknown(*b));
                Call::new(pairs.scaled(factor).add(ONE))
            }
            ("slice", Some(target), [start, end]) => {
                let size = self.size_or_unknown(target);
                let (start, end) = (self.literal(*start, 0), self.literal(*end, size.max));
                allocating(1.0, Range::fixed(end.wrapping_sub(start)))
            }
            ("lists.range", None, [count]) => allocating(1.0, Range::fixed(self.literal(*count, u64::MAX))),
            ("reverse", Some(target), []) => allocating(1.0, self.size_or_unknown(target)),
            ("flatten", Some(target), args) => {
                let depth = args.first().map_or(1, |depth| self.literal(*depth, u64::MAX));
                allocating(depth as f64, self.size_or_unknown(target))
            }
            ("distinct" | "sort", Some(_), []) | ("@sortByAssociatedKeys", _, [_]) => {
                let compared = args.first().copied().or(target)?;
                let size = self.size_or_unknown(compared);
                let factor = if overload == "sort_text" { 2.0 + TEXT } else { 2.0 };
                allocating(factor, size.multiply(size))
            }
            _ => return None,
        })
    }

    fn literal(&self, id: Id, otherwise: u64) -> u64 {
        match self.checked.ast.kind(id) {
            Kind::Literal(Literal::Int(value)) => (*value).max(0) as u64,
            _ => otherwise,
        }
    }

    fn kubernetes_call(
        &mut self,
        function: &str,
        overload: &str,
        target: Option<Id>,
        args: &[Id],
    ) -> Option<Call> {
        let first = args.first().map(|arg| self.size_or_unknown(*arg));
        let target_size = target.map(|target| self.size_or_unknown(target));
        Some(match function {
            "check" => Call::new(Range::fixed(AUTHORIZATION)),
            "serviceAccount" | "path" | "group" | "resource" | "subresource" | "namespace" | "name"
            | "allowed" | "reason" | "error" | "errored" => Call::new(ONE),
            "fieldSelector" | "labelSelector" => {
                let length = first?;
                let requirements = length.scaled(0.5).scaled((LIST + STRUCT) as f64);
                Call::new(Range::fixed(LIST).add(length.scaled(TEXT)).add(requirements))
            }
            "isSorted" | "sum" | "max" | "min" | "indexOf" | "lastIndexOf" => {
                let (target, size) = (target?, target_size?);
                match self.checked.ty(target) {
                    Type::List(item) => {
                        let mut each = ONE;
                        if matches!(**item, Type::String | Type::Bytes) {
                            each = each.add(self.item_size(target).scaled(TEXT));
                        }
                        Call::new(size.multiply(each))
                    }
                    _ => Call::new(size.scaled(TEXT)),
                }
            }
            "url" | "jsonpatch.escapeKey" if args.len() == 1 => Call::sized(first?.scaled(TEXT), first?),
            "lowerAscii" | "upperAscii" | "substring" | "trim" => {
                Call::sized(target_size?.scaled(TEXT), target_size?)
            }
            "replace" if args.len() >= 2 => {
                let size = target_size?;
                let result = replaced(size, first?, self.size_or_unknown(args[1]));
                Call::sized(size.scaled(2.0 * TEXT), result)
            }
            "split" => {
                let size = target_size?;
                let most = args.get(1).map_or(size.max, |limit| match self.checked.ast.kind(*limit) {
                    Kind::Literal(Literal::Int(limit)) => *limit as u64,
                    _ => size.max,
                });
                Call::sized(size.scaled(2.0 * TEXT), Range { min: 0, max: most })
            }
            "join" => {
                let (target, count) = (target?, target_size?);
                let mut size = match self.checked.ty(target) {
                    Type::List(_) => count.multiply(self.item_size(target)),
                    _ => Range::ZERO,
                };
                if let Some(separator) = first {
                    let between =
                        Range { min: count.min.saturating_sub(1), max: count.max.saturating_sub(1) };
                    size = size.add(separator.multiply(between));
                }
                Call::sized(size.scaled(TEXT), size)
            }
            "find" | "findAll" => {
                let (text, pattern) = (target_size?, first?);
                let cost = text.add(ONE).scaled(TEXT).multiply(pattern.scaled(REGEX));
                Call::sized(cost, Range { min: 0, max: text.max })
            }
            "ip" if overload == "cidr_ip" => Call::new(ONE),
            "cidr" | "isIP" | "isCIDR" | "ip" | "quantity" | "isQuantity" | "semver" | "isSemver" => {
                Call::new(first?.scaled(TEXT))
            }
            "ip.isCanonical" => Call::new(first?.scaled(2.0 * TEXT)),
            "masked"
            | "prefixLength"
            | "family"
            | "isUnspecified"
            | "isLoopback"
            | "isLinkLocalMulticast"
            | "isLinkLocalUnicast"
            | "isGlobalUnicast" => Call::new(ONE),
            "containsIP" => {
                let mut cost = ADDRESS.add(ADDRESS).scaled(TEXT);
                if overload == "cidr_contains_ip_string" {
                    cost = cost.add(first?.scaled(TEXT));
                }
                Call::new(cost)
            }
            "containsCIDR" => {
                let mut cost = ADDRESS.add(ADDRESS).scaled(TEXT).add(ADDRESS.scaled(TEXT)).add(ONE);
                if overload == "cidr_contains_cidr_string" {
                    cost = cost.add(first?.scaled(TEXT));
                }
                Call::new(cost)
            }
            "validate" => Call::new(first?.scaled(TEXT).scaled(FORMAT_REGEX as f64 * REGEX)),
            "format.named" | "sign" | "asInteger" | "isInteger" | "asApproximateFloat" | "isGreaterThan"
            | "isLessThan" | "compareTo" | "add" | "sub" | "major" | "minor" | "patch" | "getScheme"
            | "getHostname" | "getHost" | "getPort" | "getEscapedPath" | "getQuery" => Call::new(ONE),
            "_==_" => return self.library_equality(args),
            _ => return None,
        })
    }

    /// Of the items of a list.
    fn item_size(&self, list: Id) -> Range {
        match self.origin(list) {
            Origin::Known(Decl { items: Some(item), .. }) => Range { min: 0, max: item.max },
            _ => Range::UNKNOWN,
        }
    }

    fn library_equality(&mut self, args: &[Id]) -> Option<Call> {
        let [a, b] = args else { return None };
        let (Type::Opaque(name, _), Type::Opaque(other, _)) = (self.checked.ty(*a), self.checked.ty(*b))
        else {
            return None;
        };
        if name != other {
            return None;
        }
        Some(Call::new(match *name {
            "kubernetes.NamedFormat" => Range { min: 1, max: LONGEST_FORMAT_NAME }.scaled(TEXT),
            "kubernetes.URL" => {
                let most = self.size(*b).map_or(1, |size| size.max);
                Range { min: 1, max: most }.scaled(TEXT)
            }
            name if name.starts_with("kubernetes.") || name.starts_with("net.") => ONE,
            _ => return None,
        }))
    }
}

/// How long a text gets when everything of one length in it is replaced by something of another.
fn replaced(text: Range, old: Range, new: Range) -> Range {
    let mut count = Range::ZERO;
    let mut kept = Range::ZERO;
    if old.min == 0 {
        // Nothing is found around every character.
        count.max = text.max.saturating_add(1);
        kept.max = text.max;
    } else if new.max <= old.min {
        kept.max = text.max;
    } else {
        count.max = (text.max as f64 / old.min as f64).ceil() as u64;
    }
    if old.max == 0 {
        count.min = text.min.saturating_add(1);
        kept.min = text.min;
    } else if old.max <= new.min {
        kept.min = text.min;
    } else {
        count.min = (text.min as f64 / old.max as f64).ceil() as u64;
    }
    count.multiply(new).add(kept)
}
