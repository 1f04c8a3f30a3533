{{/* What an installed release cannot change: Kubernetes would refuse it in words of its own, after a part of the upgrade, or
     take an empty volume for the release's. Asked where helm can: at install and upgrade. */}}

{{- define "tinsmith.checkDataVolume" -}}
{{- $name := printf "%s-data" (include "tinsmith.fullname" .) -}}
{{- $live := lookup "v1" "PersistentVolumeClaim" .Release.Namespace $name | default dict -}}
{{- if $live -}}
{{- if not (has .Values.data.accessMode $live.spec.accessModes) -}}
{{- fail (printf "data.accessMode is %s, and the volume %s is there with %s, which cannot be changed: keep that, or move its files to a new claim and name it in data.existingClaim" .Values.data.accessMode $name (join ", " $live.spec.accessModes)) -}}
{{- end -}}
{{- if and .Values.data.storageClass (ne .Values.data.storageClass ($live.spec.storageClassName | default "")) -}}
{{- fail (printf "data.storageClass is %s, and the volume %s is there with %q, which cannot be changed: keep that, or move its files to a new claim and name it in data.existingClaim" .Values.data.storageClass $name ($live.spec.storageClassName | default "")) -}}
{{- end -}}
{{- if lt (include "tinsmith.mebibytes" .Values.data.size | int64) (include "tinsmith.mebibytes" $live.spec.resources.requests.storage | int64) -}}
{{- fail (printf "data.size is %v, and the volume %s is there with %v: it can only grow" .Values.data.size $name $live.spec.resources.requests.storage) -}}
{{- end -}}
{{- else -}}
{{- range (lookup "v1" "PersistentVolumeClaim" .Release.Namespace "" | default dict).items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- if and (eq (get $labels "app.kubernetes.io/name") $.Chart.Name) (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) (eq (get $labels "app.kubernetes.io/component") "data") -}}
{{- fail (printf "release %s has the volume %s, and would get an empty one called %s: set fullnameOverride to %s, or name a volume in data.existingClaim" $.Release.Name .metadata.name $name (trimSuffix "-data" .metadata.name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tinsmith.checkRedisVolume" -}}
{{- $name := printf "%s-redis" (include "tinsmith.fullname" .) -}}
{{- range ((lookup "apps/v1" "StatefulSet" .Release.Namespace $name | default dict).spec | default dict).volumeClaimTemplates -}}
{{- $own := $.Values.redis.storage -}}
{{- $class := .spec.storageClassName | default "" -}}
{{- $size := .spec.resources.requests.storage -}}
{{- if or (ne $own.storageClass $class) (ne (include "tinsmith.mebibytes" $own.size) (include "tinsmith.mebibytes" $size)) -}}
{{- fail (printf "redis.storage is %v of class %q, and StatefulSet %s was made with %v of class %q, which cannot be changed: keep that; for a larger one change the claim data-%s-0, and delete the StatefulSet with --cascade=orphan first" $own.size $own.storageClass $name $size $class $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
